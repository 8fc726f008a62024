"""Container images: written or built here, and brought to the nodes without a registry."""
