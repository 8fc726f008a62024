"""Container images: built here, and copied into the nodes without a registry."""
