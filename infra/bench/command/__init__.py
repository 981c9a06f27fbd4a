"""The benches of `atelier bench`: Atelier beside its peers, on this machine."""
