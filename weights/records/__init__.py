"""Values of the whole package: manifests, dtypes, errors. Imports nothing of the package."""
