"""Parts for other frameworks. The library imports none of them itself."""
