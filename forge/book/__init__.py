"""The chapter runner: Markdown with live experiments in it, read page by page in a terminal or straight through.

`chapter` parses a text into blocks, `catalog` finds the texts, `measured` fills in and checks what depends on a run,
`source_code` cuts the engine's own functions out of their files, `session` holds what one reader has measured and
guessed so far, `drawing` turns blocks into lines, `pager` shows them key by key and `print_chapter` in one go;
`chapters/outcomes.py` renders all that a chapter may say. The grammar of the directives is described in
`chapters/README.md`.

Nothing here runs a command itself: the command that opens a chapter passes a function that does.
"""
