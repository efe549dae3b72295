"""An answer's way from the decode tier, and on from another replica when one fails."""
