"""SlackServe in virtual time: the decision code that serves, over traces and measured operator times."""
