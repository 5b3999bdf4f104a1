"""The model: configurations, the two towers, published weights."""
