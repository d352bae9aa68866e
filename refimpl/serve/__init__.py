"""The live server: HTTP in front of an engine that runs on a thread of its own."""
