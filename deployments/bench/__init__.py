"""The command `atelier bench`: figures of this machine, ours and the peers' in one run."""
