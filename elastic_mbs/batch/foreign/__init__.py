"""Types of other packages, known by what they can do: no package is imported."""
