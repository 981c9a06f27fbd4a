"""Jobs: requests that are kept until their results are there, and the results."""
