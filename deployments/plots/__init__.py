"""Pictures of figures, as SVG files."""
