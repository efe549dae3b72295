"""What an operator is given: rules, alerts and dashboards, generated from the metrics and the targets."""
