"""Code that travels to the hosts: standard library only, Python 3.9 or newer."""
