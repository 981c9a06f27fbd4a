"""ComfyUI's protocol: a prompt is a job, its history is the job's result, and its images are files of its key."""
