"""The commands of ``refimpl``, a file a subject. What one needs is imported when it runs."""
