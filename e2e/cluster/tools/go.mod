module stoker.dev/e2e/cluster/tools

go 1.26
