"""The APIs of other libraries, on top of ringway."""
