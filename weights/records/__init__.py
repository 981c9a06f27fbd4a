"""What everything else speaks of: manifests, dtypes, errors. Imports nothing of the package."""
