"""The command line: one file per command. Each parses, calls the library and hands records to a view."""
