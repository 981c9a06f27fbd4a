"""`python -m infra.bench peers`: its parts, and the sides that they measure."""
