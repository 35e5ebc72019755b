"""The stall watch: notices calls that wait too long, and finds out which ranks they wait for and why."""
