"""How a store keeps its promises on disk: staging, publishing, layouts, durability."""
