"""The controller: it observes workers and queues, plans by `cluster/control`, and orders. A named actor."""
