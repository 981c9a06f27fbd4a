"""The start and the end of a cluster: Ray, the door's ports, templates of processes, checks of nodes."""
