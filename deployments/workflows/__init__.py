"""ComfyUI's workflows: read, checked before anything runs, and run over what a cluster serves."""
