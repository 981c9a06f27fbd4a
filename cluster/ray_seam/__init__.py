"""The only importer of private names of Ray and Serve: a file per purpose; `shims.py` lists the names."""
