class DeliveryConformance:
    pass
