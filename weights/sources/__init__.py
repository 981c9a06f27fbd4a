"""Sources of checkpoints: folders as they are, object storage through a resumable copy on local disk."""
