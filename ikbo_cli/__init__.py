"""ikbo: find user-side work that a ranking model repeats per candidate, and run it once per user.

`import ikbo_cli` is light (no torch); `import ikbo_cli.ops` registers the operators.
"""

__version__ = "0.1.0"
