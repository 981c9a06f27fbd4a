"""Benchmarks behind the tables of BENCHMARKS.md, beside the peers; `python -m infra.bench` runs them in a checkout."""
