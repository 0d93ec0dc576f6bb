"""How the tokens of a row say whether they are trained."""

IGNORED = -100  # label of a token that is not trained
