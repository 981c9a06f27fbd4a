"""What a request may ask for, and what it gets where it says nothing."""
