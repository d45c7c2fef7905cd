"""A data set shown to people: statistics, pictures, decoded documents."""
