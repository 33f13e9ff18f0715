"""What administrators allow and add: the chart's policy, and rules for pod templates."""
