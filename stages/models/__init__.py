"""Models as files: found and identified without loading, loaded safely, asked, and placed where the user looks."""
