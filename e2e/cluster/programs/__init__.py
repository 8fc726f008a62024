"""The cluster's programs, built from Go modules that are pinned below go/."""
