"""The agreement of a batch's parts on its number of samples, and what is said where they do not."""
