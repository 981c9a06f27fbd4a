"""The controller's decisions: models on workers, the number of workers, the worker of a request. Pure."""
