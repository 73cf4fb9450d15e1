"""The command line: one file a subcommand, each a thin caller of public names."""
