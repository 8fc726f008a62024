"""The cluster's programs, built from the pinned Go modules in go/."""
