"""Regular languages over bytes: Python's regexes and their algebra as automata, determinised as far as they are used."""
