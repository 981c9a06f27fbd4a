"""Where checkpoints come from: folders as they are, object storage through a resumable copy on local disk."""
