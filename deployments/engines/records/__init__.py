"""The records of the engines: requests, results, errors, images and sounds."""
