module orca/cluster/fetch

go 1.25.0
