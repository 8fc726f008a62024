"""The machine of the cluster: commands, packages, cache, cgroups, namespaces, and the cluster's layout."""
