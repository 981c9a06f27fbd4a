"""What the engines speak of: requests, results, errors, images and sounds."""
