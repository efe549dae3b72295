"""What the engines of both tiers are started with: arguments, environment and cores."""
