"""Models and functions chained by a graph in the config: checked as a whole, run as one request."""
