"""The machine that the cluster runs on: commands, packages, cache, cgroups, namespaces and the layout of it all."""
