// dotnet new console; dotnet add package NServiceBus; dotnet add package NServiceBus.RabbitMQ
using Contoso.Messages;
using NServiceBus;

var broker = Environment.GetEnvironmentVariable("BROKER") ?? "amqp://guest:guest@localhost";
var configuration = new EndpointConfiguration("Sales");
configuration.UseSerialization<SystemJsonSerializer>();
configuration.EnableInstallers();
var transport = new RabbitMQTransport(RoutingTopology.Conventional(QueueType.Quorum), broker);
configuration.UseTransport(transport).RouteToEndpoint(typeof(BillOrder), "Billing");

var endpoint = await Endpoint.Start(configuration);
await endpoint.Send(new BillOrder { OrderId = "17" });

var later = new SendOptions();
later.DelayDeliveryWith(TimeSpan.FromSeconds(10));
await endpoint.Send(new BillOrder { OrderId = "18" }, later);

Console.ReadLine();
await endpoint.Stop();

namespace Contoso.Messages
{
    public class BillOrder : ICommand
    {
        public string OrderId { get; set; } = "";
    }

    public class OrderBilled : IMessage
    {
        public string OrderId { get; set; } = "";
    }
}

public class OrderBilledHandler : IHandleMessages<OrderBilled>
{
    public Task Handle(OrderBilled message, IMessageHandlerContext context)
    {
        Console.WriteLine($"order {message.OrderId} is billed");
        return Task.CompletedTask;
    }
}
