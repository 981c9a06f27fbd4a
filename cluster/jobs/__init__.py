"""Jobs: requests that are kept until they have results, and the results."""
