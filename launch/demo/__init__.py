"""Steps of launch/demo.sh."""
