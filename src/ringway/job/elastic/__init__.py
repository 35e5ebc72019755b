"""Jobs whose ranks come and go: `ElasticJob`."""
