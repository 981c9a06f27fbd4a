"""The store's internals: staging, publishing, layouts, index, durability."""
